"""`edkm eval`: perplexity, size, speed and benchmark tasks of any causal language model."""
