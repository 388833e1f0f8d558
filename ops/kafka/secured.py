"""A Kafka node with an authorizer switched on, for tests: SASL, TLS with client certificates, SASL over TLS.

On `bootstrap_servers` nobody is asked who they are and may do everything; `sasl`, `tls` and `sasl_tls` are addresses
where users may do what an ACL allows and nothing else. Needs openssl.
"""

import base64
import json
import subprocess
from pathlib import Path

from broker import KafkaServer, free_ports

USERS = ("worker", "client", "operator", "developer", "nobody")

SECURED = """\
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
ssl.keystore.type=PEM
ssl.keystore.location={folder}/server.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/ca.pem
listener.name.tls.ssl.client.auth=required
ssl.principal.mapping.rules=RULE:^.*CN=([a-z]+).*$/$1/
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER
"""
SASL = """\
listener.name.{name}.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required {users};
listener.name.{name}.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.{name}.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.{name}.oauthbearer.sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule \
required unsecuredLoginStringClaim_sub="broker";
"""


def password_of(user: str) -> str:
    """With PLAIN and SCRAM."""
    return f"{user}-secret"


def unsigned_token(user: str, now: float, seconds: float = 300.0) -> str:
    """A token as Kafka's unsecured validator, which is for tests, takes it."""

    def part(fields: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part({'sub': user, 'iat': now - 1, 'exp': now + seconds})}."


class SecuredKafka(KafkaServer):
    """See the module. `ca.pem`, and for each user `<user>.pem` with `<user>.key` (password: `password_of`), lie in
    `folder`."""

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "ca.pem").exists():
            make_certificates(self.folder)
        super().start()
        config = dict(line.split("=", 1) for line in (self.folder / "server.properties").read_text().splitlines())
        addresses = dict(part.split("://") for part in config["listeners"].split(","))
        self.sasl, self.tls, self.sasl_tls = (addresses[name] for name in ("SASL", "TLS", "SASLTLS"))

    def _changed(self, config: str) -> str:
        added = dict(zip(("SASL", "TLS", "SASLTLS"), free_ports(3), strict=True))
        protocols = {"SASL": "SASL_PLAINTEXT", "TLS": "SSL", "SASLTLS": "SASL_SSL"}
        lines = []
        for line in config.splitlines():
            if line.startswith(("listeners=", "advertised.listeners=")):
                line += "".join(f",{name}://127.0.0.1:{port}" for name, port in added.items())
            if line.startswith("listener.security.protocol.map="):
                line += "".join(f",{name}:{protocol}" for name, protocol in protocols.items())
            lines.append(line)
        users = " ".join(f'user_{user}="{password_of(user)}"' for user in USERS)
        sasl = [SASL.format(name=name, users=users) for name in ("sasl", "sasltls")]
        return "".join(["\n".join(lines), "\n", SECURED.format(folder=self.folder), *sasl])

    def _format_arguments(self) -> list[str]:
        return [
            word
            for user in USERS
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
            for word in ("--add-scram", f"{mechanism}=[name={user},password={password_of(user)}]")
        ]


def make_certificates(folder: Path) -> None:
    """An authority, the node's certificate for 127.0.0.1, and one for each user with a locked key."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    openssl("req", "-x509", *new_key, "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    for name in ("server", *USERS):
        lock = ("-nodes",) if name == "server" else ("-passout", f"pass:{password_of(name)}")
        openssl("req", *new_key, *lock, "-keyout", f"{name}.key", "-out", "asked.csr", "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "7")
        openssl("x509", "-req", "-in", "asked.csr", *signing, "-out", f"{name}.crt")
        certificate, key = ((folder / f"{name}.{end}").read_text() for end in ("crt", "key"))
        (folder / f"{name}.pem").write_text(key + certificate if name == "server" else certificate)
