"""The identities of states: the feature map's, the rotation's, and whether z is known."""

DIGITS = 16  # hexadecimal digits of the digest of a map's tensors, which follows "#" in an identity
WITHOUT_Z = "; without z"  # ends the identity of a state whose z is unknown: see ``state_from_sums``


def same_identity(a: str, b: str) -> bool:
    """True if the states of two maps may be mixed: the identities are equal, where "?" equals any digest.

    >>> from linrope.recurrence.identities import same_identity
    >>> same_identity("T2R(4)#0123456789abcdef; None", "T2R(4)#?; None")
    True
    >>> same_identity("T2R(4)#0123456789abcdef; None", "T2R(4)#fedcba9876543210; None")
    False
    """
    if a == b:
        return True
    a_fields, b_fields = a.split("#"), b.split("#")
    return len(a_fields) == len(b_fields) and all(map(_same_field, a_fields, b_fields))


def may_replace(new: str, old: str) -> bool:
    """True if calls that continue a state of the identity old may continue one of the identity new instead.

    >>> from linrope.recurrence.identities import may_replace
    >>> may_replace("features; None", "features; None; without z")
    True
    >>> may_replace("features; None; without z", "features; None")
    False
    """
    if new == old:
        return True
    ignored = WITHOUT_Z if old.endswith(WITHOUT_Z) else ""  # such calls do not read z
    return same_identity(new.removesuffix(ignored), old.removesuffix(ignored))


def _same_field(a: str, b: str) -> bool:
    """Compares one '#'-separated field of two identities."""
    if a == b:
        return True
    rests = [field[1:] if field[:1] == "?" else field[DIGITS:] for field in (a, b)]
    return "?" in (a[:1], b[:1]) and rests[0] == rests[1]
