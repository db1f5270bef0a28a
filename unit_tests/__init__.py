"""Tests, in folders that mirror the product's; helpers/ is what several share, data/ their rows."""
