"""How the embedded model is trained; not part of the installed package."""
