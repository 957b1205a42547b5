"""A model split over processes, and the order in which it is built there."""
