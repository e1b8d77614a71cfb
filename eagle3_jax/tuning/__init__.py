"""What sizes of draft cost and bring on this machine, and the choice among them."""
