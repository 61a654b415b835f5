"""Side-by-side measurements; each package is one command."""
