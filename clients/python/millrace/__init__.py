"""Client of a Millrace router. See Client."""
from millrace.answer import Answer
from millrace.client import Client
from millrace.errors import Cancelled, DeadlineExceeded, Error, InvalidRequest, Overloaded, Unavailable

__all__ = ["Answer", "Cancelled", "Client", "DeadlineExceeded", "Error", "InvalidRequest", "Overloaded", "Unavailable"]
