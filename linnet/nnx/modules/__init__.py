"""Modules and what they offer beside their attributes.

``module`` has ``Module`` and what surrounds the call of one; ``containers`` has ``List``, ``Dict``
and ``Sequential``; ``capture`` collects what a run sows; ``views`` copies a module with other
attributes and the same Variables; ``freezing`` keeps Variables from being trained.
"""
