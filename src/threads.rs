//! Threads of this process: those of the CPU kernels and casts, and those that read tensors along with the thread that
//! steps. Invariant: they are this process's own. A fork takes none along, and work handed to threads that are gone would
//! never end, so a child gets threads of its own at first use.

use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Elements for which waking threads costs more than they save: some 30 microseconds of one thread's work.
const ALONE: u64 = 1 << 15;

/// Threads for one purpose.
pub struct Pool {
    /// How many; 0 for rayon's choice, `None` for none.
    threads: fn() -> Option<usize>,
    /// The pool, and the process that made it.
    known: Mutex<Option<(u32, &'static ThreadPool)>>,
}

/// Run kernels and casts: as many as the machine has cores, or `RAYON_NUM_THREADS`.
pub static KERNELS: Pool = Pool::new(|| Some(0));
/// Read tensors: up to five, on at most half of the cores that the process may use.
pub static READERS: Pool = Pool::new(|| {
    let half = available_parallelism().map_or(0, |cores| cores.get() / 2);
    (half > 0).then_some(half.min(5))
});

impl Pool {
    const fn new(threads: fn() -> Option<usize>) -> Pool {
        Pool { threads, known: Mutex::new(None) }
    }

    /// Calls `work` with each number below `count`, on several threads if that is worth it: there are `elements` in all.
    /// Each thread has something of its own, made by `own`.
    pub fn each<T>(
        &'static self,
        count: u64,
        elements: u64,
        own: impl Fn() -> T + Send + Sync,
        work: impl Fn(&mut T, u64) + Send + Sync,
    ) {
        let pool = if elements < ALONE { None } else { self.pool() };
        match pool {
            Some(pool) => pool.install(|| (0..count).into_par_iter().for_each_init(own, work)),
            None => {
                let mut own = own();
                (0..count).for_each(|number| work(&mut own, number));
            }
        }
    }

    /// Has every thread run `work` as soon as it can; does not wait for them.
    pub fn call(&'static self, work: impl Fn() + Send + Sync + 'static) {
        if let Some(pool) = self.pool() {
            pool.spawn_broadcast(move |_| work());
        }
    }

    fn pool(&'static self) -> Option<&'static ThreadPool> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        match *known {
            Some((maker, pool)) if maker == process => Some(pool),
            _ => {
                let builder = ThreadPoolBuilder::new().num_threads((self.threads)()?);
                // Never dropped: to drop a parent's pool would be to wait for its threads.
                let pool: &'static ThreadPool = Box::leak(Box::new(builder.build().ok()?));
                *known = Some((process, pool));
                Some(pool)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn one_process_has_one_pool() {
        let first = KERNELS.pool().expect("threads");
        assert!(std::ptr::eq(first, KERNELS.pool().expect("threads")));
    }

    #[test]
    fn each_number_is_worked_on_once_and_little_work_on_the_calling_thread() {
        for elements in [ALONE - 1, ALONE] {
            let (sender, receiver) = mpsc::channel();
            KERNELS.each(
                1000,
                elements,
                || sender.clone(),
                |sender, number| {
                    sender.send((number, std::thread::current().id())).expect("somebody listens");
                },
            );
            drop(sender);
            let (mut numbers, threads): (Vec<_>, Vec<_>) = receiver.iter().unzip();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..1000).collect::<Vec<_>>());
            let here = threads.iter().filter(|&&thread| thread == std::thread::current().id()).count();
            assert_eq!(here, if elements < ALONE { 1000 } else { 0 });
        }
    }

    #[test]
    fn every_thread_is_called() {
        let (sender, receiver) = mpsc::channel();
        READERS.call(move || sender.send(rayon::current_thread_index()).expect("somebody listens"));
        let mut threads: Vec<_> = receiver.iter().collect();
        threads.sort_unstable();
        let expected = (READERS.threads)().unwrap_or(0);
        assert_eq!(threads, (0..expected).map(Some).collect::<Vec<_>>());
    }
}
