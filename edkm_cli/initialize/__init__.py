"""Dense model -> clustered model: importance, k-means, error compensation, loading in shards."""
