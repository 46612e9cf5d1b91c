"""What a bundle is, and running one. Imports nothing else of turbovit."""
