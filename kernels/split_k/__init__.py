"""Matrix products with few rows and columns and a long K, cut along K."""
