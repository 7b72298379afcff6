//! Begins to find the largest magnitudes of scaled states while later parameters are still read: that pass changes nothing of
//! the optimizer, so it may run before all is checked.
//! Invariant: the pass over a part of a table begins once its parameters were read in this step and are of the kinds
//! planned for.

use pyo3::prelude::*;

use crate::options::Header;
use crate::plan::GroupPlan;
use crate::plan::column::Work;
use crate::python::device::{Readiness, Run, readiness};
use crate::python::reader::Reader;

/// A group's launches, begun while the group is read.
pub struct Early<'py> {
    header: Header,
    /// One of each bucket.
    runs: Vec<Run<'py>>,
    /// Per bucket, how many parameters of each table were read.
    read: Vec<Vec<usize>>,
}

/// Tensors that are begun together, at least: enough for the device not to wait for the next ones, and more than fit the
/// smallest kernel parameter, so that the table's own kernel takes them.
const PART: usize = 128;

impl<'py> Early<'py> {
    /// Ready to begin, if the plan of the last step has scaled states and may run.
    pub fn new(
        py: Python<'py>,
        reader: &Reader<'py>,
        plan: &GroupPlan,
        header: &Header,
    ) -> PyResult<Option<Early<'py>>> {
        let buckets = plan.buckets();
        if !buckets.iter().any(|bucket| bucket.variant.two_passes()) || !matches!(readiness(plan), Readiness::Ready) {
            return Ok(None);
        }
        let read = buckets.iter().map(|bucket| vec![0; bucket.tables.len()]).collect();
        let runs = buckets.iter().map(|bucket| Run::new(reader, py, bucket)).collect::<PyResult<_>>()?;
        Ok(Some(Early { header: *header, runs, read }))
    }

    /// Takes the next parameter that was read; false if the plan is not made for it, and nothing more may begin.
    pub fn take(&mut self, py: Python<'py>, plan: &mut GroupPlan, index: usize, work: &Option<Work>) -> PyResult<bool> {
        let Some(place) = plan.take(index, work) else { return Ok(false) };
        if let Some((bucket, table)) = place {
            let read = &mut self.read[bucket][table];
            // Places in a table are in the order of the parameters.
            *read += 1;
            let (run, bucket) = (&mut self.runs[bucket], &plan.buckets()[bucket]);
            let left = bucket.tables[table].len().saturating_sub(*read);
            if left == 0 || read.is_multiple_of(PART) && left >= PART {
                // SAFETY: the addresses up to here were read in this step, from tensors that the optimizer holds; if one is
                // given up after this, its memory is reused in the order of this stream.
                unsafe { run.begin(py, bucket, table, *read, &self.header) }?;
            }
        }
        Ok(true)
    }

    /// The launches that were begun.
    pub fn runs(self) -> Vec<Run<'py>> {
        self.runs
    }
}
