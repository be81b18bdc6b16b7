"""Jobs of other frameworks: `from_trainer` (Hugging Face) and `from_lightning` read what these declare, once.

The training loops of the frameworks do not run. The core knows no framework, and no module here is loaded
before one is used.
"""
