"""Measurements that figures of the documentation rest on; run from a checkout, not installed.

``latent``, ``latent_prompts`` and ``deepseek`` measure MLA, ``charts`` draws what ``kdacompile bench --json`` wrote.
"""
