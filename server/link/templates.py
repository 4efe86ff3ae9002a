"""The YAML files that a new federation begins with."""

from knnper.config.address import Address

_SERVER = """\
# Settings of the server; start it with: knnper server server.yaml
# Relative paths are relative to this file's folder.
name: federation
listen: 0.0.0.0:{port}          # the gateway: all that clients can reach
control: 127.0.0.1:{control_port}      # Flower's own port, for commands on this machine
{security}
authorized: authorized        # one public key NAME.pub a client; read while it runs
state: state                  # what the server keeps: registrations, runs, logs
"""
_SERVER_TLS = "tls: {ca: ca.crt, certificate: server.crt, key: server.key}"
_SERVER_INSECURE = "insecure: true                # no encryption, no authentication"

_CLIENT = """\
# Settings of one client. Relative paths are relative to this file's folder.
name: "{name}"
server: {server}
{security}
state: state                  # what the client keeps: its models and its memory
data: {{name: image_folder, path: data}}  # its own data; see: knnper data check
train: true                   # false: only gets the model, does not train it
share_metrics: true           # false: the server learns no accuracy of this client
limits:                       # what a run may do here; see docs/security.md
  min_examples: 32            # different training examples behind an update, at least
  min_steps: 1                # and steps of training
  methods: null               # a list such as [knn_per, fedavg]; null: any
  models: null                # a list such as [tiny_cnn]; null: any
  experiment: null            # fingerprint of the only one: knnper data check --task
  training_rounds: 1000       # updates sent within the last `days`, over all runs
  validation_rounds: 100      # answers with metrics, likewise
  days: 30                    # null: for ever
service: {{host: 127.0.0.1, port: 8080}}  # where it answers predictions
"""
_CLIENT_TLS = """\
tls: {{ca: ca.crt}}             # the authority that signed the server's certificate
key: {name}.key               # proves who this client is; never leaves this machine"""
_CLIENT_INSECURE = "insecure: true                # no encryption, no authentication"


def server_yaml(port: int, control_port: int, insecure: bool) -> str:
    """Return the server's settings as YAML with comments."""
    security = _SERVER_INSECURE if insecure else _SERVER_TLS
    return _SERVER.format(port=port, control_port=control_port, security=security)


def client_yaml(name: str, server: Address, insecure: bool) -> str:
    """Return the settings of the client ``name`` as YAML with comments."""
    security = _CLIENT_INSECURE if insecure else _CLIENT_TLS.format(name=name)
    return _CLIENT.format(name=name, server=server, security=security)
