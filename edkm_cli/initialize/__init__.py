"""Dense model -> clustered model: importance, k-means, embeddings, compensation, reconstruction, shards."""
