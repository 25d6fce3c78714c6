"""Drafts: what they are fed when SGLang serves them, and whether a dataset holds the same."""
