"""dilabench.bench"""
