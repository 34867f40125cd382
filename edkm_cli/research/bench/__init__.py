"""`edkm bench` and `edkm ablate`: measurements of the clustering engine and of the memory techniques."""
