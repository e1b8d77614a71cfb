"""Measuring: acceptance, speed, losslessness; figures and tables of them."""
