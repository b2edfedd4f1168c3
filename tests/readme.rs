//! What the README promises is tested under the name it gives.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// Names of functions in the tests.
fn functions() -> HashSet<String> {
    let mut found = HashSet::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")).unwrap() {
        let Ok(text) = fs::read_to_string(entry.unwrap().path()) else {
            continue; // a directory
        };
        let names = text.lines().filter_map(|l| l.trim().strip_prefix("fn "));
        found.extend(names.filter_map(|l| Some(l.split_once('(')?.0.to_owned())));
    }
    found
}

#[test]
fn every_test_the_readme_names_exists() {
    let readme = include_str!("../README.md");
    let quoted = readme.split('`').skip(1).step_by(2);
    let is_sentence = |name: &&str| {
        name.matches('_').count() >= 3
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    let named: Vec<&str> = quoted.filter(is_sentence).collect();
    assert!(named.len() > 20, "only {} tests are named", named.len());
    let functions = functions();
    let missing: Vec<&&str> = named.iter().filter(|n| !functions.contains(**n)).collect();
    assert!(
        missing.is_empty(),
        "named in the README, but no test: {missing:?}"
    );
}
