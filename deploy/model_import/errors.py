"""The one error which the importer reports to its user."""


class ImportFailure(Exception):
    """The file, the folder or the network is not as it must be. The message names the value and the limit."""
