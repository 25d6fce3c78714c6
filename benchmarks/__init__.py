"""Rival ways of getting hidden states out of an engine, side by side: ``make bench``."""
