"""Running engines, watched through their metrics."""
