"""Campaigns against the disk tier: faults at random, by the hundred, and what they cost.

Owns: the campaigns that ``make test-faults`` runs, one module each, and the table that they make.
Does not own: the tests of single faults (the other files of this folder). pytest collects nothing
here; test_campaigns.py runs each campaign at reduced size.

The process that runs a campaign is not a server: every server is a child, so that its death can be
counted. Every payload follows from its key, so that any answer can be checked by anybody.
"""
