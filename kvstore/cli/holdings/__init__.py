"""What lies on the medium of a tier, whether an engine is at work there or not: looked at, cleaned, carried away."""
