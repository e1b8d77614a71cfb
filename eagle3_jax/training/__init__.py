"""Cached or online features to a trained head."""
