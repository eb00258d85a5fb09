"""Journals: event sourcing on a typed stream whose keys are entities' ids."""
