//! One step of one optimizer: read everything, check everything, then count and launch.
//! Invariant: until the first counter advances nothing of the optimizer has changed, and from there to the last launch
//! no Python code of the user's runs.

use pyo3::exceptions::{PyKeyError, PyRuntimeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

use crate::options::Header;
use crate::plan::GroupPlan;
use crate::python::again::Buffers;
use crate::python::device::{Readiness, Run, VariantNames, parameter_bytes, readiness, variant_names};
use crate::python::group::{Aftermath, GroupReader, Outcome, Release};
use crate::python::options::{LiveTensors, Switches, advance, read_live, read_options};
use crate::python::prefetch::Trails;
use crate::python::ranges::Ranges;
use crate::python::reader::{Reader, StateWalk};
use crate::python::recall::Kinds;
use crate::tensor::Device;

/// Classes of tensors that a plan remembers.
const MOST_CLASSES: usize = 32;
/// Kinds of tensors that a plan may know beside those of its tensors.
const SPARE_KINDS: usize = 64;

/// What one group's last step was.
#[derive(Default)]
struct GroupRecord {
    plan: GroupPlan,
    trails: Trails,
    buffers: Buffers,
    tier: &'static str,
    reason: String,
    steps: u64,
    launches: u64,
}

/// The plan of one optimizer's groups. Holds numbers only: no tensor, gradient or parameter is kept alive by it.
#[pyclass(module = "te_patches._core")]
#[derive(Default)]
pub struct Plan {
    groups: Vec<GroupRecord>,
    kinds: Kinds,
    /// Classes of its tensors, and where their objects point at their local tensors.
    classes: Vec<(Py<PyType>, Option<u64>)>,
    /// What the last step's optimizer was told.
    switches: Option<Switches>,
}

/// What Python has to do before the step can go on; the optimizer is as it was.
#[derive(IntoPyObject)]
pub enum Todo<'py> {
    /// ("initialize", [(parameter, whether its master is a remainder)])
    Initialize((&'static str, Vec<(Bound<'py, PyAny>, bool)>)),
    /// ("prove", [(device, kernel's names)])
    Prove((&'static str, Vec<(u16, VariantNames)>)),
    /// ("lower", [(group, tier)]): serve these groups in a lower tier, then name them in `served`.
    Lower((&'static str, Vec<(usize, &'static str)>)),
}

#[pymethods]
impl Plan {
    #[new]
    fn new() -> Plan {
        Plan::default()
    }

    /// Takes one step, or returns what has to be done first. `mode`: "auto", "native" or "te". `served`: groups already
    /// stepped in a lower tier. `release`: what the installed Transformer Engine does. `live`: in capturable mode the
    /// (step, inv_scale, skip) of each group, one-element tensors; counters are then the caller's to advance.
    fn step<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
        mode: &str,
        served: Vec<usize>,
        release: Release,
        live: Option<Vec<LiveTensors<'py>>>,
    ) -> PyResult<Option<Todo<'py>>> {
        let py = optimizer.py();
        let switches = Switches::read(optimizer)?;
        let groups: Vec<Bound<'py, PyAny>> =
            optimizer.getattr(intern!(py, "param_groups"))?.try_iter()?.collect::<PyResult<_>>()?;
        let state = optimizer.getattr(intern!(py, "state"))?.cast_into::<PyDict>()?;
        let scales = optimizer.getattr(intern!(py, "_scales"))?.cast_into::<PyDict>()?;
        let mut scales = StateWalk::new(scales);
        let (mut reader, mut walk, mut aftermath) = (Reader::new(py)?, StateWalk::new(state), Aftermath::default());
        reader.look_again(&self.classes)?;
        let ranges = Ranges::new(py)?;
        self.groups.truncate(groups.len());
        self.groups.resize_with(groups.len(), GroupRecord::default);
        let noted: usize = self.groups.iter().map(|record| record.trails.tensors()).sum();
        let renumbered = self.kinds.keep_within(SPARE_KINDS + 4 * noted);
        if renumbered || self.switches.as_ref() != Some(&switches) {
            self.groups.iter_mut().for_each(|record| record.trails.forget_checks());
            self.switches = Some(switches.clone());
        }

        let mut ready: Vec<(usize, Bound<'py, PyDict>, Header, Vec<Run<'py>>)> = Vec::with_capacity(groups.len());
        let (mut uncounted, mut moved) = (Vec::new(), Vec::new());
        let (mut uninitialised, mut unproven, mut lower) = (Vec::new(), Vec::new(), Vec::new());
        for (index, group) in groups.iter().enumerate() {
            if served.contains(&index) {
                continue;
            }
            let group = group.cast::<PyDict>()?;
            let params = group.get_item(intern!(py, "params"))?.ok_or_else(|| PyKeyError::new_err("params"))?;
            let record = &mut self.groups[index];
            if params.len()? == 0 {
                (record.tier, record.reason) = ("native", "no parameters".to_owned());
                record.plan.update(&[], 0);
                if release.counts_empty_groups {
                    uncounted.push(group.clone());
                }
                continue;
            }
            let options = read_options(group, &switches)?;
            let quantized = aftermath.quantized();
            let mut group_reader = GroupReader {
                reader: &mut reader,
                walk: &mut walk,
                scales: &mut scales,
                aftermath: &mut aftermath,
                trails: &mut record.trails,
                kinds: &mut self.kinds,
                buffers: &mut record.buffers,
                switches: &switches,
                release: &release,
                group: index,
            };
            let outcome = {
                let _range = ranges.open(|| format!("te_patches: group {index}: read"));
                group_reader.read(&params)?
            };
            match outcome {
                Outcome::Uninitialised(params) => uninitialised.extend(params),
                Outcome::Unserved(reason) => {
                    (record.tier, record.reason) = ("stock", reason.to_owned());
                    lower.push((index, "stock"));
                }
                Outcome::Works => {
                    let works = &record.buffers.works;
                    // Lists alone do for the simple options. Stock orders counters and flags of capturable groups among
                    // themselves, and scales and quantizes after its kernels.
                    let simple = !switches.capturable && switches.in_place() && aftermath.quantized() == quantized;
                    let device = works.iter().flatten().next().map_or(Device::Cpu, |work| work.signature.device);
                    record.plan.update(works, parameter_bytes(device));
                    (record.tier, record.reason) = ("native", String::new());
                    let simple = simple && record.plan.buckets().iter().all(|bucket| !bucket.variant.is_scaled());
                    let below = if simple { "replay" } else { "stock" };
                    if mode == "te" {
                        (record.tier, record.reason) = (below, "kernels=\"te\"".to_owned());
                        lower.push((index, below));
                        continue;
                    }
                    match readiness(&record.plan) {
                        Readiness::Ready => {
                            let header = match &live {
                                None => Header::new(&options),
                                Some(live) => {
                                    read_live(&mut reader, group, &options, &record.plan, live, index, &mut moved)?
                                }
                            };
                            let buckets = record.plan.buckets().iter();
                            let runs = buckets.map(|bucket| Run::new(&reader, py, bucket)).collect::<PyResult<_>>()?;
                            ready.push((index, group.clone(), header, runs));
                        }
                        Readiness::Unproven(variants) => unproven.extend(variants),
                        Readiness::Unusable(reason) if mode == "native" => {
                            return Err(PyRuntimeError::new_err(format!(
                                "te_patches: kernels=\"native\", but group {index} cannot be served natively: {reason}"
                            )));
                        }
                        Readiness::Unusable(reason) => {
                            (record.tier, record.reason) = (below, reason);
                            lower.push((index, below));
                        }
                    }
                }
            }
        }
        if !uninitialised.is_empty() {
            return Ok(Some(Todo::Initialize(("initialize", uninitialised))));
        }
        if !unproven.is_empty() {
            unproven.sort_by_key(|&(device, variant)| (device, variant.name()));
            unproven.dedup();
            let unproven = unproven.into_iter().map(|(device, variant)| (device, variant_names(variant))).collect();
            return Ok(Some(Todo::Prove(("prove", unproven))));
        }
        if !lower.is_empty() {
            return Ok(Some(Todo::Lower(("lower", lower))));
        }

        if live.is_none() {
            for group in uncounted.iter().chain(ready.iter().map(|(_, group, ..)| group)) {
                advance(group)?;
            }
        }
        for (index, _, header, runs) in ready {
            let record = &mut self.groups[index];
            for (bucket, run) in record.plan.buckets().iter().zip(runs) {
                let _range = ranges.open(|| format!("te_patches: group {index}: {}", bucket.variant.name()));
                // SAFETY: the addresses were read in this call; since then only counters were written.
                record.launches += unsafe { run.launch(py, bucket, &header) }?;
            }
            record.steps += 1;
        }
        self.classes = reader.classes();
        self.classes.truncate(MOST_CLASSES);
        aftermath.finish(py)?;
        Ok(None)
    }

    /// Per group: index, tier, reason, kernels, tensors, elements, steps taken natively, launches, plans made,
    /// parameters that the last step found as they were.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let row = |(index, record): (usize, &GroupRecord)| {
            let row = PyDict::new(py);
            let (tensors, elements) = record.plan.size();
            let kernels: Vec<String> =
                record.plan.buckets().iter().map(|b| format!("{} ({})", b.variant.name(), b.device)).collect();
            row.set_item("index", index)?;
            row.set_item("tier", record.tier)?;
            row.set_item("reason", &record.reason)?;
            row.set_item("kernels", if record.tier == "native" { kernels } else { Vec::new() })?;
            row.set_item("tensors", tensors)?;
            row.set_item("elements", elements)?;
            row.set_item("steps", record.steps)?;
            row.set_item("launches", record.launches)?;
            row.set_item("plans", record.plan.built())?;
            row.set_item("recalled", record.buffers.recalled)?;
            Ok(row)
        };
        self.groups.iter().enumerate().map(row).collect()
    }
}
