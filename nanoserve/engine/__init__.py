"""The brain: it decides with integers what runs next. Nothing in this package imports torch."""
