"""Several engines behind one door: which of them a request goes to, and what they tell of it."""
