"""Suites `quick` and `implementations`: does it work, and what is fastest?"""
