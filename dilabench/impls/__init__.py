"""dilabench.impls"""
