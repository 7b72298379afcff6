//! Begins to find the largest magnitudes of scaled states while later parameters are still read: that pass changes nothing of
//! the optimizer, so it may run before all is checked.
//! Invariant: a table's pass begins once all its parameters were read in this step and are of the kinds planned for.

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
    /// Per bucket, how many parameters of each table are still to be read.
    left: Vec<Vec<usize>>,
}

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
        let left = buckets.iter().map(|bucket| bucket.tables.iter().map(|table| table.len()).collect()).collect();
        let runs = buckets.iter().map(|bucket| Run::new(reader, py, bucket)).collect::<PyResult<_>>()?;
        Ok(Some(Early { header: *header, runs, left }))
    }

    /// Takes the next parameter that was read; false if the plan is not made for it, and nothing more may begin.
    pub fn take(&mut self, py: Python<'py>, plan: &mut GroupPlan, index: usize, work: &Option<Work>) -> PyResult<bool> {
        let Some(place) = plan.take(index, work) else { return Ok(false) };
        if let Some((bucket, table)) = place {
            let left = &mut self.left[bucket][table];
            *left = left.saturating_sub(1);
            if *left == 0 {
                // SAFETY: all addresses of the table were read in this step, from tensors that the optimizer holds; if one
                // is given up after this, its memory is reused in the order of this stream.
                unsafe { self.runs[bucket].begin(py, &plan.buckets()[bucket], table, &self.header) }?;
            }
        }
        Ok(true)
    }

    /// The launches that were begun.
    pub fn runs(self) -> Vec<Run<'py>> {
        self.runs
    }
}
