"""p2ptrain: train one model together over the internet, without a coordinator."""

__version__ = "0.1.0"
