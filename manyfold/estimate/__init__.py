"""Estimates of J(pi_k) from episodes: returns, the registry of estimators, runs, and what runs say."""
