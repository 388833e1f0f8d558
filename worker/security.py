"""The security of Kafka's connections as the settings ask for it: files and functions are found here, or named."""

import ssl
from typing import TYPE_CHECKING

from pydantic import SecretStr

from worker.broker.kafka_security import KafkaSecurity, TokenSource, token_from_file, token_from_function
from worker.errors import StartError
from worker.hooks import load_function

if TYPE_CHECKING:
    from worker.settings import Settings  # which checks itself with this file

TLS_SETTINGS = ("tls_ca_file", "tls_certificate_file", "tls_key_file", "tls_key_password")
TOKEN_SETTINGS = ("sasl_oauth_token_file", "sasl_oauth_token_provider")


def check_security(settings: "Settings") -> None:
    """Raise ValueError for security settings that do not go together. Reads no file."""
    protocol, mechanism = settings.security_protocol, settings.sasl_mechanism
    tokens = [name for name in TOKEN_SETTINGS if getattr(settings, name) is not None]
    if "SASL" in protocol and mechanism == "OAUTHBEARER" and len(tokens) != 1:
        raise ValueError(f"sasl_mechanism OAUTHBEARER needs one of {' and '.join(TOKEN_SETTINGS)}")
    named = settings.sasl_username is not None and settings.sasl_password is not None
    if "SASL" in protocol and mechanism != "OAUTHBEARER" and not named:
        raise ValueError(f"security_protocol {protocol} needs sasl_username and sasl_password")
    if tokens and not ("SASL" in protocol and mechanism == "OAUTHBEARER"):
        raise ValueError(f"{tokens[0]} needs security_protocol SASL_SSL and sasl_mechanism OAUTHBEARER")
    given = [name for name in TLS_SETTINGS if getattr(settings, name) is not None]
    if given and not protocol.endswith("SSL"):  # never plain text where somebody meant to encrypt
        raise ValueError(f"{given[0]} needs security_protocol SSL or SASL_SSL")
    if settings.tls_certificate_file is None and len(given) > (settings.tls_ca_file is not None):
        raise ValueError(f"{given[-1]} needs tls_certificate_file")


def security_of(settings: "Settings") -> KafkaSecurity:
    """Raises StartError that names the setting whose file or function cannot be used."""
    return KafkaSecurity(
        protocol=settings.security_protocol,
        mechanism=settings.sasl_mechanism,
        username=settings.sasl_username,
        password=_revealed(settings.sasl_password),
        token=_token_source(settings),
        tls=_tls_context(settings) if settings.security_protocol.endswith("SSL") else None,
    )


def _revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _tls_context(settings: "Settings") -> ssl.SSLContext:
    """Kafka's certificate and host name are always checked; without `tls_ca_file` by the authorities of the system."""
    context = ssl.create_default_context()
    if settings.tls_ca_file is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(settings.tls_ca_file)
        except (OSError, ssl.SSLError) as error:
            raise StartError(f"tls_ca_file: cannot use {settings.tls_ca_file} ({_why(error)})") from None
    if settings.tls_certificate_file is not None:
        files = (settings.tls_certificate_file, settings.tls_key_file)
        password = _revealed(settings.tls_key_password)
        try:
            # never ask on a terminal for the password of a key: a worker has none
            context.load_cert_chain(*files, password=lambda: password or "")
        except (OSError, ssl.SSLError) as error:
            named = " and ".join(str(file) for file in files if file is not None)
            raise StartError(
                f"tls_certificate_file: cannot use {named} ({_why(error)}; is tls_key_password right?)"
            ) from None
    return context


def _why(error: OSError) -> str:
    return error.strerror or getattr(error, "reason", None) or type(error).__name__


def _token_source(settings: "Settings") -> TokenSource | None:
    if settings.sasl_oauth_token_file is not None:
        return token_from_file(settings.sasl_oauth_token_file)
    if settings.sasl_oauth_token_provider is None:
        return None
    return token_from_function(load_function("sasl_oauth_token_provider", settings.sasl_oauth_token_provider))
