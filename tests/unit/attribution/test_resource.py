"""What has to work again, as the words of the error name it."""

import pytest

from resilience_sdk.attribution.exits import NAME, PORT, STORAGE, Resource, failed_resource


@pytest.mark.parametrize(
    ("cause", "text", "expected"),
    [
        (
            "storage_full",
            "OSError: [Errno 28] No space left on device: '/data/a b/x.pt'",
            Resource(STORAGE, "/data/a b/x.pt"),
        ),
        ("storage_full", "RuntimeError: [enforce fail at inline_container.cc:820] unexpected pos", Resource(STORAGE)),
        ("storage_readonly", "cannot create '/mnt/r/x'", Resource(STORAGE, "/mnt/r/x")),
        ("dns_failure", "gaierror: [Errno -2] Name or service not known", Resource(NAME)),
        ("dns_failure", "Failed to resolve 'huggingface.co' ([Errno -3])", Resource(NAME, "huggingface.co")),
        ("dns_failure", "HTTPSConnectionPool(host='hf.co', port=443): Max retries", Resource(NAME, "hf.co")),
        ("port_in_use", "failed to bind to any local address. port: 29500, useIpv6: 0", Resource(PORT, "29500")),
        ("port_in_use", "OSError: [Errno 98] Address already in use", Resource(PORT)),
        ("user_code_error", "ValueError: '/data/x'", None),
        ("rank_segfault", "died by SIGSEGV", None),
    ],
)
def test_the_resource_is_named_where_the_error_names_it(cause, text, expected):
    """Else only its kind is known; most causes have nothing to wait for."""
    found = failed_resource(cause, ["it was the first to die", text])
    assert found == expected
    assert found is None or str(found)
