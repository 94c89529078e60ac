"""How the precision of a run is written."""


def precision_text(hosts: str | None, policy: str | None, is_mixed: bool = False) -> str:
    """The precision in which hosts and policy compute, such as ``float32, policy bfloat16``.

    Args:
        hosts: dtype of the hosts' mixed precision, None for none.
        policy: dtype of the trunk of the policy, None for full precision.
        is_mixed: whether the hosts compute in mixed precision, for runs that did not note its
            dtype.
    """
    of_hosts = hosts or ("mixed precision" if is_mixed else "float32")
    return of_hosts if policy is None else f"{of_hosts}, policy {policy}"
