"""`oncelog doctor`: check a deployment, and say for each finding what to do. The checks change nothing."""
