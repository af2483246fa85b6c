"""One package for each outside project; only the user imports them."""
