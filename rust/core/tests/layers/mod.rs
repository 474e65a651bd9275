//! The graph of a crate's modules: which module needs which, and whether two of them need each other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The crate's root: whoever names an item that `lib.rs` re-exports needs everything that `lib.rs` holds.
pub const ROOT: &str = "lib";

/// For each module the modules that it needs.
pub type Graph = BTreeMap<String, BTreeSet<String>>;

/// The graph of the crate that is tested. Two of its modules that need each other, directly or through others, panic.
pub fn check_layers() -> Graph {
    let graph = graph(&sources());
    if let Some(cycle) = cycle(&graph) {
        panic!(
            "these modules need each other in a circle:\n  {}\nMove what both sides need into a module below them.",
            cycle.join("\n  -> ")
        );
    }
    graph
}

/// Each module by its path below the crate, with its source.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut folders, mut sources) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path: PathBuf = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let inside = path.strip_prefix(&root).expect("below src").with_extension("");
            let names: Vec<_> = inside.iter().map(|name| name.to_string_lossy()).collect();
            sources.push((names.join("::"), std::fs::read_to_string(path).expect("UTF-8")));
        }
    }
    sources
}

pub fn graph(sources: &[(String, String)]) -> Graph {
    let names: BTreeSet<&str> = sources.iter().map(|(name, _)| name.as_str()).collect();
    let needs = |(module, source): &(String, String)| {
        let code = code(source);
        // An indented one is of a module inside this file: it names the file itself.
        let outside = code.replace("    use super::", "");
        assert!(!outside.contains("super::"), "{module}: name modules by `crate::`, so that this test sees them");
        let mut needed: BTreeSet<String> = paths(&code).iter().map(|path| module_of(path, &names)).collect();
        // A module needs those that it declares.
        let inside = if module == ROOT { String::new() } else { format!("{module}::") };
        let declared = code.lines().filter_map(|line| line.trim().strip_prefix("mod ")?.strip_suffix(';'));
        needed.extend(declared.map(|name| format!("{inside}{name}")));
        needed.remove(module);
        (module.clone(), needed)
    };
    sources.iter().map(needs).collect()
}

/// The source without comments.
fn code(source: &str) -> String {
    source.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code).to_owned() + "\n").collect()
}

/// Every path that begins with `crate::`, those in braces too.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let is_inside_a_name = code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_');
        if !is_inside_a_name {
            tree(&code[at + "crate::".len()..], &[], &mut paths);
        }
    }
    paths
}

/// Read one tree of paths, as in `a::{b, c::D}`; what follows it.
fn tree<'a>(code: &'a str, before: &[String], paths: &mut Vec<Vec<String>>) -> &'a str {
    let code = code.trim_start();
    if let Some(mut rest) = code.strip_prefix('{') {
        loop {
            rest = rest.trim_start().trim_start_matches(',').trim_start();
            match rest.strip_prefix('}') {
                Some(rest) => return rest,
                None if rest.is_empty() => return rest,
                None => rest = tree(rest, before, paths),
            }
        }
    }
    let end = code.find(|next: char| !next.is_alphanumeric() && next != '_').unwrap_or(code.len());
    let (name, rest) = code.split_at(end);
    let mut path = before.to_vec();
    path.push(name.to_owned());
    if let Some(rest) = rest.strip_prefix("::") {
        return tree(rest, &path, paths);
    }
    paths.push(path);
    // Past `as name`, and past anything else that is no part of a path.
    rest.find([',', '}', ';', '\n']).map_or("", |end| &rest[end..])
}

/// The module that a path lies in: the longest beginning that names one.
fn module_of(path: &[String], names: &BTreeSet<&str>) -> String {
    let beginnings = (1..=path.len()).rev().map(|length| path[..length].join("::"));
    beginnings.into_iter().find(|name| names.contains(name.as_str())).unwrap_or_else(|| ROOT.to_owned())
}

/// A circle of modules, if there is one: its first module again at its end.
pub fn cycle(graph: &Graph) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| visit(graph, module, &mut Vec::new(), &mut done))
}

fn visit(graph: &Graph, module: &str, open: &mut Vec<String>, done: &mut BTreeSet<String>) -> Option<Vec<String>> {
    if let Some(start) = open.iter().position(|name| name == module) {
        return Some([&open[start..], &[module.to_owned()]].concat());
    }
    if !done.insert(module.to_owned()) {
        return None;
    }
    open.push(module.to_owned());
    let found = graph.get(module)?.iter().find_map(|needed| visit(graph, needed, open, done));
    open.pop();
    found
}
