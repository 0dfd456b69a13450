"""`NodeConfig`: the settings of one machine, which no other node needs to know.

They come from a TOML file. For containers, environment variables named P2PTRAIN_SECTION__KEY override the file: plain
text, or lists separated by commas; an empty variable counts as unset.

A path may begin with `~`, as in a shell; it is expanded here, and nowhere else."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from p2ptrain.address import ADDRESS_CHARACTERS_MAX, ADDRESS_PATTERN, Address, AddressError, parse
from p2ptrain.config.fields import K_MAX, Accepts, Clashes, DigestOrEmpty, FromArray, Option, Plugin, Rational, Section

ENVIRONMENT_PREFIX = "P2PTRAIN_"
ENVIRONMENT_DELIMITER = "__"
ADDRESSES_MAX = 64  # a longer list is probably a pasted list of peers


def _address(is_taken: Callable[[Address], bool]) -> AfterValidator:
    """Reads an address, and keeps it as multiaddr writes it."""

    def read(text: str) -> str:
        if not text:  # where the pattern takes that
            return text
        try:
            found = parse(text)
        except AddressError as error:
            raise PydanticCustomError("address", "no address: {why}", {"why": str(error)}) from error
        if not is_taken(found):
            raise PydanticCustomError("address", "another kind of address")  # `Accepts` says which
        return str(found)

    return AfterValidator(read)


AddressText: TypeAlias = Annotated[str, Field(max_length=ADDRESS_CHARACTERS_MAX, pattern=f"^{ADDRESS_PATTERN}$")]
ListenAddress = Annotated[
    AddressText,
    _address(lambda it: str(it) == it.place and not isinstance(it.host, str)),
    Accepts('an address of this machine such as "/ip4/0.0.0.0/tcp/4001"'),
]
PublicAddress = Annotated[
    AddressText,
    _address(lambda it: str(it) == it.place and it.port > 0),
    Accepts('an address that others reach such as "/ip4/203.0.113.7/tcp/4001"'),
]
PeerAddress = Annotated[
    AddressText,
    _address(lambda it: bool(it.peer_id) and it.port > 0),
    Accepts('a node\'s address with its id at the end, such as "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."'),
]
MeetingAddress = Annotated[
    str,
    Field(max_length=ADDRESS_CHARACTERS_MAX, pattern=f"^({ADDRESS_PATTERN})?$"),
    _address(lambda it: str(it) == it.place and it.transport == "tcp" and not getattr(it.host, "is_unspecified", True)),
    Accepts('this machine\'s address in your own network and a port, such as "/ip4/192.168.1.10/tcp/4100", or nothing'),
]
HostName = Annotated[
    str,
    Field(pattern=r"^(\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z._-]{1,253})(:[0-9]{1,5})?$"),
    Accepts('a host name such as "node.example.org" or "localhost:9000"'),
]


def _written_out(path: str) -> str:
    """Expands a leading `~` to the home directory."""
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise ValueError("expected a path whose ~ stands for a known home directory") from error


FilePath = Annotated[
    str,
    Field(max_length=4_096, pattern=r"^[^\x00]*$"),  # the longest that Linux opens
    AfterValidator(_written_out),
    Accepts("a path"),
]


class IdentityConfig(Section):
    """The node's identity."""

    file: FilePath = Field("", description="the node's private key; empty: identity.key in storage.directory")


class NetworkConfig(Section):
    """The addresses of this node, and the nodes that it contacts first."""

    listen: Annotated[tuple[ListenAddress, ...], FromArray] = Field(
        ("/ip4/0.0.0.0/tcp/4001",),
        max_length=ADDRESSES_MAX,
        description="addresses to listen on; /ip4/0.0.0.0 and /ip6/:: mean all of the machine's; empty: none; "
        "the default port, if it is taken and no address is announced, gives way to the one that the node had last or "
        "a free one, and so does port 0",
    )
    announce: Annotated[tuple[PublicAddress, ...], FromArray] = Field(
        (), max_length=ADDRESSES_MAX, description="addresses to publish; empty: those that others see"
    )
    bootstrap: Annotated[tuple[PeerAddress, ...], FromArray] = Field(
        (), max_length=ADDRESSES_MAX, description="nodes to contact first; empty: those remembered from the last start"
    )
    run: DigestOrEmpty = Field("", description="id of the one run that `join` may join; empty: any")
    owner: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9._ -]{0,64}$"), Accepts("up to 64 letters, digits, spaces and ._-")
    ] = Field("", description="a name for the members of the run, who see it beside this node; nobody checks it")
    nat: bool = Field(
        True, description="check whether others can reach this node, open a port on the router, use hole punching"
    )
    relay: bool = Field(True, description="connect through relays where no direct connection is possible")
    trusted_relays: Annotated[tuple[PeerAddress, ...], FromArray] = Field(
        (),
        max_length=ADDRESSES_MAX,
        description="relays through which others reach this node, the first four that answer at a start; "
        "empty: the bootstraps and remembered peers",
    )
    relay_for_others: bool = Field(
        True,
        description="relay connections of nodes that cannot connect directly, outside the byte limits; "
        "false: at most 128 KiB and two minutes each; with relay = false: none",
    )

    @property
    def has_chosen_port(self) -> bool:
        """Whether the owner relies on the port, having set `listen` or `announce` (such as a router's address)."""
        return bool(self.model_fields_set & {"listen", "announce"})


def _as_one_text(value: object) -> object:
    """Reads a list of names as one text, as it is written in the environment."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _as_written(value: object) -> object:
    """Reads a switch from the environment, where all is text."""
    return SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


SWITCHES = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
# A switch that the node sets by itself where its owner has not.
Chosen = Annotated[Literal["auto", True, False], BeforeValidator(_as_written)]


class DeviceConfig(Section):
    """The device that trains."""

    name: Annotated[
        str,
        BeforeValidator(_as_one_text),
        Field(pattern=r"^(auto|cpu|mps|cuda(:all|:[0-9]{1,3}(,cuda:[0-9]{1,3}){0,63})?)$"),
        Accepts("auto, cpu, mps, cuda, cuda:N, cuda:all or a list of cuda:N"),
    ] = Field(
        "auto",
        description="auto: the first CUDA device, or else Apple's (mps), or else the CPU; several take the steps "
        "together, in a process each",
    )
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that take the steps together on the CPU; each has its part of the threads",
    )
    shard: Chosen = Field(
        "auto",
        description="each process holds only its part of weights, gradient and inner state; the node has them whole in "
        "main memory. auto: where the run does not fit a card, but several",
    )
    nnodes: int = Field(
        1, ge=1, le=64, description="your machines that take the steps together: this, and those with `p2ptrain lend`"
    )
    rendezvous: MeetingAddress = Field("", description="with nnodes: where the others reach this one; only there")
    threads: int = Field(
        0,
        ge=0,
        le=1_024,
        description="torch threads; 0: one less than the cores that the process may use, at least one",
    )
    autocast: Literal["auto", "off", "bf16"] = Field(
        "auto", description="auto: bf16 if the device supports it in hardware"
    )
    sequences_per_pass: int = Field(
        0,
        ge=0,
        le=65_536,
        description="maximum number of sequences in one forward and backward pass; 0: as many as the run says, "
        "or as fit; on a card as many of a step's as fit",
    )
    checkpointing: Chosen = Field(
        "auto",
        description="activation checkpointing: keep only each layer's input for the backward pass; "
        "less memory, a third more work. auto: where the run does not fit otherwise",
    )
    half_state: Chosen = Field(
        "auto",
        description="keep the residual and the momentum of local steps, which no other node sees, in bf16: half their "
        "memory. auto: where the run does not fit otherwise",
    )
    compile: Chosen = Field(
        "auto",
        description="compile the layers with torch.compile, which takes some seconds before the first step. auto: the "
        "built-in model's, on a card, where it works",
    )

    def clashes(self) -> Clashes:
        if self.nnodes > 1 and not self.rendezvous:
            yield f"{self.nnodes} machines, and no place to meet", "set rendezvous to this one's address"

    @property
    def is_checkpointed(self) -> bool:
        return self.checkpointing is True

    @property
    def is_half(self) -> bool:
        return self.half_state is True

    @property
    def is_sharded(self) -> bool:
        return self.shard is True

    @property
    def is_apart(self) -> bool:
        """Whether only ranks use the device, and the node's own tensors lie in main memory."""
        return self.is_sharded or self.name == "mps"


class ChangeableLimits(Section):
    """The limits that `p2ptrain limit` changes while the node runs; each stands here once, with its option."""

    upload_bytes_per_second: Annotated[int, Option("upload", "bytes/s")] = Field(
        0, ge=0, le=10**12, description="limit on all uploads but gossip and small messages, on average; 0: none"
    )
    download_bytes_per_second: Annotated[int, Option("download", "bytes/s")] = Field(
        0, ge=0, le=10**12, description="limit on all downloads but gossip and small messages; 0: none"
    )
    memory_bytes: Annotated[int, Option("memory", "bytes")] = Field(
        0,
        ge=0,
        le=2**50,
        description="limit on main memory: a run that needs more is refused, and more in use is reported; 0: none",
    )
    hours: Annotated[
        str,
        Field(pattern=r"^(([01][0-9]|2[0-3]):[0-5][0-9]-([01][0-9]|2[0-3]):[0-5][0-9])?$"),
        Accepts('hours such as "22:00-07:00", or nothing'),
        Option("hours", "hh:mm-hh:mm"),
    ] = Field("", description="hours in which the node may train, local time; empty: always")
    device_percent: Annotated[int, Option("percent", "percent")] = Field(
        100,
        ge=1,
        le=100,
        description="percentage of its training time in which the device works; the rest of the time it idles",
    )
    k_max: Annotated[int, Option("k")] = Field(
        0,
        ge=0,
        le=K_MAX,
        description="the most numbers of a chunk in contributions to a run that lists several k; 0: no limit",
    )
    on_battery: Annotated[Literal["pause", "train"], Option("battery")] = Field(
        "pause", description="whether to train while the machine runs on battery"
    )
    on_gpu_busy: Annotated[Literal["pause", "ignore"], Option("gpu")] = Field(
        "ignore",
        description="whether to pause while other programs, such as a game, use the GPU that trains; "
        "not yet tried on a card",
    )

    def clashes(self) -> Clashes:
        start, _, end = self.hours.partition("-")
        if self.hours and start == end:
            yield f'hours = "{self.hours}" leaves no time to train', 'write "" for the whole day'


class LimitsConfig(ChangeableLimits):
    """How much of this machine the node may use."""

    disk_bytes: int = Field(
        0,
        ge=0,
        le=2**60,
        description="limit on disk space: a run that needs more, including the data of one round, is refused; as much "
        "of its data is kept as fits; 0: 95 % of what is free",
    )
    nice: int = Field(
        0,
        ge=0,
        le=19,
        description="niceness of the node and its p2pd, so that other programs go first; 0: as it was started",
    )


class Limits(ChangeableLimits):
    """The owner's limits that are in force now."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    threads: Annotated[int, Option("threads"), WithJsonSchema({"type": "integer", "minimum": 0})] = Field(
        0, ge=1, le=1_024, description="torch's threads for training, at least 1; an answer says 0 if unknown"
    )


OPTIONS = {
    name: each for name, field in Limits.model_fields.items() for each in field.metadata if isinstance(each, Option)
}


class StorageConfig(Section):
    """Storage of data and checkpoints."""

    directory: FilePath = Field("", description="directory of runs, data and keys; empty: the user's data directory")
    own_data: FilePath = Field(
        "",
        description="directory that `p2ptrain data prepare` made, for runs whose nodes train on data of their own; it "
        "is read there and never sent; empty: none",
    )
    checkpoint_every_rounds: int = Field(
        8, ge=1, le=10**6, description="rounds between checkpoints, at most half of the run's history_rounds, and 256"
    )
    checkpoints_kept: int = Field(
        4, ge=1, le=1_000, description="checkpoints to keep; each takes three to six times the weights in fp32"
    )


class PrivacyConfig(Section):
    """The most that contributions may tell of any one sequence of `storage.own_data` (differential privacy)."""

    epsilon: Rational = Field(
        Fraction(0),
        ge=0,
        le=1_000,
        description="the most that all steps on this machine's data may tell of one sequence; training stops when it "
        "is spent; 1 to 10 are usual; 0: off",
    )
    delta: Rational = Field(
        Fraction(1, 10**6),
        gt=0,
        lt=1,
        description="the chance that more is told; must be less than one in the number of sequences",
    )
    clip: Rational = Field(
        Fraction(1), gt=0, le=10**6, description="the most that the norm of one sequence's gradient counts"
    )
    noise: Rational = Field(
        Fraction(1),
        ge=Fraction(1, 100),
        le=10**4,
        description="standard deviation of the noise that is added to a step's gradients, in clips",
    )

    def clashes(self) -> Clashes:
        if not self.is_on and self != type(self).model_construct():
            yield "epsilon is 0, so there is no privacy", "set it, or remove the other keys"

    @property
    def is_on(self) -> bool:
        return self.epsilon > 0


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may resolve to any address


class AuditConfig(Section):
    """Measuring whether others have trained what they contribute."""

    share: Rational = Field(
        Fraction(35, 1_000),
        ge=0,
        le=1,
        description="of what it trains, spent on audits of its own choice; summonses come on top; 0: it does none",
    )


class SuccessionConfig(Section):
    """Motions of members that the run go on as another, with settings changed or from an earlier state."""

    accept: Literal["ask", "rates", "all", "never"] = Field(
        "ask",
        description="to which motions this node assents by itself: ask: to none, its owner decides with "
        "`p2ptrain assent`; rates: to those that change learning rates, their schedule, weight decay and the number of "
        "steps, and do not go back; all: to any; never: to none, and its owner cannot, either",
    )


class HttpConfig(Section):
    """The dashboard, and status and metrics for other programs; all of it is read-only."""

    enabled: bool = Field(True, description="whether to serve them")
    host: Annotated[
        str, Field(pattern=r"^[0-9A-Za-z.:_-]{1,253}$"), Accepts("an address or a host name of this machine")
    ] = Field("127.0.0.1", description="address to listen on; any but loopback requires a token_file")
    port: int = Field(
        8_420, ge=0, le=65_535, description="0: any free port; the default port falls back to a free one if it is taken"
    )
    token_file: FilePath = Field(
        "", description="file with the secret that readers must present, readable by its owner alone; empty: none"
    )
    allowed_hosts: Annotated[tuple[HostName, ...], FromArray] = Field(
        (),
        max_length=ADDRESSES_MAX,
        description="names by which browsers may reach it, besides host and loopback names; without a port: any port",
    )

    def clashes(self) -> Clashes:
        if not self.token_file and not is_loopback(self.host):
            what = f'host = "{self.host}" would show the node to everyone on the network'
            yield what, 'name a token_file, or set host = "127.0.0.1"'


class PluginsConfig(Section):
    """Other people's code that a run may use here. It can do anything that this user can: allow only code you trust."""

    allow: Annotated[tuple[Plugin, ...], FromArray] = Field(
        (), max_length=ADDRESSES_MAX, description="installed packages whose models and recipes runs may use"
    )


class RegionConfig(Section):
    """How this node reaches the world's run, if its own run is a region of that world."""

    bootstrap: Annotated[tuple[PeerAddress, ...], FromArray] = Field(
        (),
        max_length=ADDRESSES_MAX,
        description="nodes of the world's run to contact first; empty: those that the region's nodes tell",
    )
    listen: Annotated[tuple[ListenAddress, ...], FromArray] = Field(
        ("/ip4/0.0.0.0/tcp/0",),
        max_length=ADDRESSES_MAX,
        description="addresses to listen on for nodes of the world's run; port 0: any free one",
    )
    invitation: Annotated[str, Field(max_length=4_096)] = Field(
        "", description="invitation to the world's run, as text or a file, if it requires one"
    )


class TrackingConfig(Section):
    """Export of each round's figures to other tools."""

    tensorboard: FilePath = Field("", description="directory for TensorBoard's event files; empty: none are written")
    wandb: FilePath = Field(
        "",
        description="directory for runs of Weights & Biases (the extra [wandb]), sent if WANDB_API_KEY is set; "
        "empty: none are written",
    )
    wandb_project: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9._ -]{0,128}$"), Accepts("up to 128 letters, digits, spaces and ._-")
    ] = Field("", description="their project in Weights & Biases; empty: the run's name and the beginning of its id")


class LoggingConfig(Section):
    """The node's log."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is written")
    format: Literal["auto", "text", "json"] = Field(
        "auto", description="auto: text on a terminal, JSON lines elsewhere"
    )


class NodeConfig(BaseSettings):
    """One participant's own settings."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter=ENVIRONMENT_DELIMITER,
        env_nested_max_split=1,
        env_ignore_empty=True,
    )

    identity: IdentityConfig = IdentityConfig()
    network: NetworkConfig = NetworkConfig()
    device: DeviceConfig = DeviceConfig()
    limits: LimitsConfig = LimitsConfig()
    storage: StorageConfig = StorageConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    audit: AuditConfig = AuditConfig()
    succession: SuccessionConfig = SuccessionConfig()
    http: HttpConfig = HttpConfig()
    plugins: PluginsConfig = PluginsConfig()
    region: RegionConfig = RegionConfig()
    tracking: TrackingConfig = TrackingConfig()
    logging: LoggingConfig = LoggingConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Uses the environment first, then the file, and no other source."""
        return _Environment(settings_cls), init_settings


class _Environment(EnvSettingsSource):
    """Reads the environment, with lists separated by commas."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: object) -> object:
        return [part.strip() for part in str(value).split(",") if part.strip()]
