"""Small data sets that are shipped, and the programs that made them."""
