"""What the side-by-side benchmark is made of: rows, environments, contestants, results."""
