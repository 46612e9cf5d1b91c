"""Side-by-side measurements of the vision encoders."""
