"""Paceline: distributed speculative decoding between the edge and the cloud."""

__version__ = "0.1.0"
