"""What research needs, apart from the product: other methods, one comparison of them all, and measurements."""
