"""Measuring what a cache costs: windows of text, statistics of logits, and runs that go through the cache."""
