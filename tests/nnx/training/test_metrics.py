"""Metrics: their values, masks, merging, use under transforms, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import IgnoredArgumentWarning, MetricError
from linnet.nnx.metrics import Accuracy, Average, MetricState, Statistics, Welford
from tests.compare import assert_close
from tests.nnx.training.largest import Largest

FIRST, SECOND = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([3.0, 2.0, 1.0, 0.0])
LOGITS, LABELS = jnp.array([[0.1, 0.9], [0.8, 0.2]]), jnp.array([1, 1])

close = functools.partial(assert_close, rtol=1e-6, atol=0)


def statistics(mean, error, deviation):
    return Statistics(mean=mean, standard_error_of_mean=error, standard_deviation=deviation)


# ---- values, beside those of Flax 0.12.8 --------------------------------------------------------


def test_average():
    metric = Average()
    assert jnp.isnan(metric.compute()) and metric.compute().dtype == jnp.float32
    metric.update(values=FIRST)
    assert metric.compute() == 2.5
    metric.update(values=SECOND, mask=jnp.array([1, 0, 1, 0]))
    close(metric.compute(), 2.3333333)
    metric.update(values=5)
    close(metric.compute(), 2.7142856)
    metric.update(values=5.5)
    assert metric.compute() == 3.0625
    assert (float(metric.total.value), int(metric.count.value)) == (24.5, 8)
    metric.reset()
    assert (float(metric.total.value), int(metric.count.value)) == (0, 0)
    assert type(metric.total) is type(metric.count) is MetricState


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (jnp.array([1, 2]), 1.5),
        (jnp.array([True, False]), 0.5),
        (np.ones((2, 3), np.float16), 1.0),
        (jnp.ones(1001, jnp.bfloat16), 1.0),
    ],
    ids=["int", "bool", "float16", "bfloat16"],
)
def test_dtypes_of_averaged_values(values, want):
    metric = Average("loss")
    metric.update(loss=values)
    assert metric.compute() == want and metric.argname == "loss"
    assert metric.total.value.dtype == jnp.float32 and metric.count.value.dtype == jnp.int32
    assert metric.total.value == want * values.size  # summed in float32


@pytest.mark.parametrize("metric", [Average(), Welford()], ids=["Average", "Welford"])
def test_masks(metric):
    values = jnp.array([[1.0, 2.0, jnp.nan], [3.0, 6.0, jnp.nan]])
    for mask, want in [
        (jnp.array([[True, True, False]] * 2), 3.0),
        (jnp.array([[1, 1, 0], [0, 0, 0]]), 1.5),
        (jnp.array([[True, True, False]]), 3.0),  # broadcasts
    ]:
        metric.reset()
        metric.update(values=values, mask=mask)
        mean = metric.compute()
        assert (mean.mean if isinstance(metric, Welford) else mean) == want
    before = nnx.to_pure_dict(nnx.state(metric))
    metric.update(values=values, mask=jnp.zeros((2, 3), bool))  # nothing counts
    close(nnx.to_pure_dict(nnx.state(metric)), before)


def test_accuracy_of_many_classes():
    metric = Accuracy()
    metric.update(logits=LOGITS, labels=LABELS)
    assert metric.compute() == 0.5
    metric.update(logits=LOGITS, labels=LABELS, mask=jnp.array([1, 0]))
    close(metric.compute(), 0.6666667)
    metric.reset()
    metric.update(
        logits=jnp.ones((2, 3, 4)),
        labels=np.zeros((2, 3), np.uint8),
        mask=jnp.array([[1, 1, 1], [1, 0, 0]]),
    )
    assert metric.compute() == 1 and int(metric.count.value) == 4
    metric.update(logits=jnp.ones(4), labels=jnp.array(1))
    close(metric.compute(), 0.8)


def test_accuracy_of_two_classes():
    metric = Accuracy(threshold=0.5)
    logits, labels = jnp.array([0.1, 0.6, 0.7, 0.2]), jnp.array([0, 1, 0, 0])
    metric.update(logits=logits, labels=labels)
    assert metric.compute() == 0.75
    metric.update(logits=logits, labels=labels, mask=jnp.array([1, 1, 0, 0]))
    close(metric.compute(), 0.8333333)
    metric.reset()
    metric.update(logits=jnp.array([0.5]), labels=jnp.array([True]))
    assert metric.compute() == 1
    assert Accuracy(None, "y").argname == Accuracy(argname="y").argname == "y"


def test_welford():
    metric = Welford()
    close(metric.compute(), statistics(0.0, jnp.nan, jnp.nan))
    metric.update(values=FIRST)
    close(metric.compute(), statistics(2.5, 0.559017, 1.118034))
    metric.update(values=SECOND)
    close(metric.compute(), statistics(2.0, 0.43301272, 1.2247449))
    assert (int(metric.count.value), float(metric.m2.value)) == (8, 12.0)
    metric.update(values=SECOND, mask=jnp.array([1, 0, 1, 0]))
    seen = np.array([1, 2, 3, 4, 3, 2, 1, 0, 3, 1])
    close(metric.compute(), statistics(seen.mean(), seen.std() / 10**0.5, seen.std()))
    metric.reset()
    metric.update(values=3)
    close(metric.compute(), statistics(3.0, 0.0, 0.0))
    assert metric.compute().replace(mean=7).mean == 7


def test_welford_is_stable():
    values = 1e4 + jnp.array([0.0, 1.0, 2.0, 3.0])
    metric = Welford()
    for value in values:
        metric.update(values=value)
    close(metric.compute(), statistics(10001.5, 0.559017, 1.118034))


# ---- several, and one's own ---------------------------------------------------------------------


def several():
    return nnx.MultiMetric(accuracy=Accuracy(), loss=Average("loss"), largest=Largest())


def batch(scale=1.0):
    loss = scale * jnp.array([1.0, 2.0])
    return {"logits": LOGITS, "labels": LABELS, "loss": loss, "values": loss}


def test_several_metrics():
    metrics = several()
    assert isinstance(metrics, nnx.Metric) and type(metrics.loss) is Average
    metrics.update(**batch())
    assert list(metrics.compute()) == ["accuracy", "loss", "largest"]
    close(metrics.compute(), {"accuracy": 0.5, "loss": 1.5, "largest": 2.0})
    metrics.update(**batch(3.0))
    assert metrics.loss.compute() == 3.0
    metrics.reset()
    close(metrics.compute(), {"accuracy": jnp.nan, "loss": jnp.nan, "largest": -jnp.inf})


def test_each_metric_gets_what_it_takes():
    class Perplexity(Average):
        def update(self, *, logits, labels, **_):
            super().update(values=jnp.exp(-logits[0, labels[0]]))

    class Seen(nnx.Metric):
        def __init__(self):
            self.names = ()

        def update(self, **kwargs):
            self.names = tuple(kwargs)

        def reset(self):
            self.names = ()

        def compute(self):
            return self.names

    metrics = nnx.MultiMetric(
        perplexity=Perplexity(), seen=Seen(), inner=nnx.MultiMetric(loss=Average("loss"))
    )
    metrics.update(**batch(), more=3)
    found = metrics.compute()
    close(found["perplexity"], np.exp(-0.9))
    assert found["seen"] == ("logits", "labels", "loss", "values", "more")
    assert found["inner"]["loss"] == 1.5


def test_masks_go_to_the_metrics_by_name():
    first, second = jnp.array([True, False]), jnp.array([False, True])

    def computed(mask):
        metrics = nnx.MultiMetric(
            accuracy=Accuracy(),
            loss=Average("loss"),
            inner=nnx.MultiMetric(loss=Average("loss"), largest=Largest()),
        )
        metrics.update(**batch(), mask=mask)
        return metrics.compute()

    found = computed({"loss": second, "inner": {"loss": first}})
    close(found, {"accuracy": 0.5, "loss": 2.0, "inner": {"loss": 1.0, "largest": 2.0}})
    assert computed({"accuracy": first, "loss": None})["loss"] == 1.5
    assert computed({})["loss"] == computed(None)["loss"] == 1.5


# ---- transforms, parts --------------------------------------------------------------------------


def test_metrics_update_in_place_under_jit_and_scan():
    metrics, traces = several(), []
    states = nnx.to_flat_state(nnx.state(metrics)).leaves

    @nnx.jit
    def update(metrics, scale):
        traces.append(None)
        metrics.update(**batch(scale))

    for scale in (1.0, 3.0):
        update(metrics, scale)
    close(metrics.compute(), {"accuracy": 0.5, "loss": 3.0, "largest": 6.0})
    nnx.jit(lambda metrics: metrics.reset())(metrics)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def over_batches(metrics, scale):
        metrics.update(**batch(scale))
        return metrics

    over_batches(metrics, jnp.array([1.0, 3.0]))
    close(metrics.compute(), {"accuracy": 0.5, "loss": 3.0, "largest": 6.0})
    assert len(traces) == 1
    kept = nnx.to_flat_state(nnx.state(metrics)).leaves
    assert all(a is b for a, b in zip(states, kept, strict=True))


def test_metrics_are_split_and_merged_with_plain_jit():
    metric = Average()
    graphdef, state = metric.split()
    assert [len(s) for s in metric.split(MetricState, ...)[1:]] == [2, 0]

    @jax.jit
    def update(state, values):
        metric = nnx.merge(graphdef, state)
        metric.update(values=values)
        return nnx.state(metric)

    for values in (FIRST, SECOND):
        state = update(state, values)
    assert nnx.merge(graphdef, state).compute() == 2.0


@pytest.mark.parametrize(
    "make",
    [Average, Welford, Largest, lambda: nnx.MultiMetric(a=Average(), b=Welford(), c=Largest())],
    ids=["Average", "Welford", "own", "MultiMetric"],
)
def test_merging_is_seeing_all(make):
    first, second, both = make(), make(), make()
    first.update(values=FIRST)
    second.update(values=SECOND[:3])
    before = [nnx.to_pure_dict(nnx.state(m)) for m in (first, second)]
    both.update(values=jnp.concatenate([FIRST, SECOND[:3]]))
    close(first.merge(second).compute(), both.compute())
    close(first.merge(make()).compute(), first.compute())  # an empty one adds nothing
    close([nnx.to_pure_dict(nnx.state(m)) for m in (first, second)], before)


# ---- bad input ----------------------------------------------------------------------------------

REFUSED = {
    "missing": (
        lambda: Average().update(loss=1.0, mask=None),
        "Expected keyword argument 'values': Average.update got 'loss'.\n"
        "Fix: metric.update(values=...), or build it with another argname.",
    ),
    "none at all": (lambda: Welford().update(), "'values': Welford.update got nothing."),
    "mask": (
        lambda: Average().update(values=jnp.ones((2, 3)), mask=jnp.ones(2)),
        "Average.update got a mask of shape (2,) for values of shape (2, 3).\n"
        "Fix: give the mask the shape of the values, or one that broadcasts to it, such as "
        "mask[:, None].",
    ),
    "a dict of masks for one metric": (
        lambda: Average().update(values=FIRST, mask={"loss": None}),
        "Average.update got a dict as mask.\n"
        "Fix: pass an array; nnx.MultiMetric alone takes masks by the names of its metrics.",
    ),
    "a mask for no metric": (
        lambda: several().update(**batch(), mask={"los": jnp.ones(2)}),
        "MultiMetric.update got masks for 'los', but its metrics are 'accuracy', 'largest', "
        "'loss'.\nFix: name the masks as the metrics are named.",
    ),
    "a mask for a metric that takes none": (
        lambda: several().update(**batch(), mask={"largest": jnp.ones(2)}),
        "MultiMetric.update got a mask for 'largest', but Largest.update takes 'values'.\n"
        "Fix: leave that mask out, or have the metric's update take mask.",
    ),
    "mask that would widen": (
        lambda: Average().update(values=1.0, mask=jnp.ones(2)),
        "a mask of shape (2,) for values of shape ()",
    ),
    "one-hot labels": (
        lambda: Accuracy().update(logits=LOGITS, labels=jnp.ones((2, 2), int)),
        "For multi-class classification, expected logits.ndim==labels.ndim+1 and equal sizes, got "
        "logits of shape (2, 2) and labels of shape (2, 2).\nFix: pass integer labels",
    ),
    "two logits for two classes": (
        lambda: Accuracy(threshold=0.5).update(logits=LOGITS, labels=LABELS),
        "For binary classification, expected logits.ndim==labels.ndim and equal sizes",
    ),
    "batch sizes": (
        lambda: Accuracy().update(logits=LOGITS, labels=jnp.ones(3, int)),
        "logits of shape (2, 2) and labels of shape (3,)",
    ),
    "float labels": (
        lambda: Accuracy().update(logits=LOGITS, labels=jnp.ones(2)),
        "Expected integer labels, such as labels.dtype==jnp.int32, got float32.\n"
        "Fix: labels.astype(jnp.int32), or labels.argmax(-1) of one-hot labels.",
    ),
    "a name of its own": (
        lambda: nnx.MultiMetric(update=Average()),
        "MultiMetric cannot have a metric named 'update', which is a name of its own.\n"
        "Fix: choose another name, such as 'update_metric'.",
    ),
    "no metric": (
        lambda: nnx.MultiMetric(loss=3),
        "MultiMetric got loss=3, which is no metric: it lacks update, reset or compute.",
    ),
    "a class": (
        lambda: nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average),
        "MultiMetric got loss=Average, which is a class and no metric.\n"
        "Fix: make one, loss=Average(...).",
    ),
}


IGNORED = {
    "unknown": (
        lambda: Average("loss").update(loss=1.0, logits=1.0),
        "Average.update got 'logits', which it does not know and ignores; it takes 'loss', "
        "'mask'.\n"
        "Fix: leave that out; the argument that is averaged has the name argname.",
    ),
    "unknown to Accuracy": (
        lambda: Accuracy().update(logits=LOGITS, labels=LABELS, loss=1.0),
        "Accuracy.update got 'loss', which it does not know and ignores; it takes 'labels', "
        "'logits', 'mask'.",
    ),
    "unknown to all": (
        lambda: several().update(**batch(), los=1.0),
        "MultiMetric.update got 'los', which it does not know and ignores; it takes 'labels', "
        "'logits', 'loss', 'mask', 'values'.\nFix: leave that out, or give a metric that name",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_is_ignored(name):
    call, message = IGNORED[name]
    with pytest.warns(IgnoredArgumentWarning) as caught:
        call()
    assert message in str(caught[0].message) and caught[0].filename == __file__


def test_arguments_that_nobody_takes_change_nothing():
    metric = Average("loss")
    with pytest.warns(IgnoredArgumentWarning):
        metric.update(loss=jnp.array([1.0, 2.0]), logits=3.0)
    assert metric.compute() == 1.5


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(MetricError) as caught:
        call()
    assert message in str(caught.value)
    assert issubclass(MetricError, TypeError) and issubclass(MetricError, ValueError)


def test_a_missing_argument_names_the_metric():
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments") as caught:
        several().update(loss=1.0, values=FIRST)
    assert caught.value.__notes__ == ["This was the metric 'accuracy' of a MultiMetric."]


@pytest.mark.parametrize("threshold", ["0.5", 1])
def test_a_threshold_is_a_float(threshold):
    with pytest.raises(TypeError, match="Expected threshold to be a float, got"):
        Accuracy(threshold=threshold)


@pytest.mark.parametrize("method", ["reset", "update", "compute", "merge", "__init__"])
def test_what_a_metric_does_not_define(method):
    class Empty(nnx.Metric):
        def __init__(self):
            pass

    with pytest.raises(NotImplementedError, match=rf"does not define {method}\(\)"):
        if method == "__init__":
            nnx.Metric()
        getattr(Empty(), method)(*[None] * (method == "merge"))
