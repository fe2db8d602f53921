"""Simulation of hosts with tiers: what is loaded from where, without any store.

`traces` reads what engines were asked for; `hosts` lets simulated hosts serve it.
"""
