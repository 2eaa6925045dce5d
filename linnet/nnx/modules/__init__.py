"""Modules and what they offer beside their attributes.

``module`` has ``Module`` and the scope and policy that its call runs in; ``containers`` has
``List``, ``Dict`` and ``Sequential``; ``capture`` collects what a run sows; ``views`` copies a
module with other attributes and the same Variables; ``freezing`` keeps Variables from training.

A class derived from ``Module`` gets its ``__call__`` wrapped. A call of the wrapper takes the
precision policy of the module, enters its named scope where a transform traces, and runs the
method. What the method sows becomes an attribute of the module, which ``nnx.pop`` takes out. Under
``nnx.capture`` the method runs on a copy with the same Variables, what it sows stays on the copy,
and is returned as a state.
"""
